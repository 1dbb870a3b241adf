"""The rungs of the CPU, in their order."""

from anatomy.cpu import r01_naive  # noqa: F401, I001  (each import adds a rung: the order is the ladder's)
from anatomy.cpu import r02_loop_order  # noqa: F401
from anatomy.cpu import r03_blocked  # noqa: F401
from anatomy.cpu import r04_vector  # noqa: F401
from anatomy.cpu import r05_register_tile  # noqa: F401
from anatomy.cpu import r06_packed  # noqa: F401
from anatomy.cpu import r07_bf16_dot  # noqa: F401
from anatomy.cpu import r08_amx  # noqa: F401
from anatomy.cpu import r09_prefetch  # noqa: F401
from anatomy.cpu import r10_threads  # noqa: F401
from anatomy.cpu import r11_shipped  # noqa: F401
from anatomy.cpu import r12_shipped_pairs  # noqa: F401
