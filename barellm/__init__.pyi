from barellm import kernels as kernels
from barellm.api import Model as Model
from barellm.api import load as load
from barellm.runs import Run as Run
from barellm.runs import Step as Step
from barellm.runs import train as train

__version__: str
