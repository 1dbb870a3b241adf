"""The rungs of the GPU, in their order."""

from anatomy.gpu import r01_naive  # noqa: F401, I001  (each import adds a rung: the order is the ladder's)
from anatomy.gpu import r02_coalesced  # noqa: F401
from anatomy.gpu import r03_shared  # noqa: F401
from anatomy.gpu import r04_tile_1d  # noqa: F401
from anatomy.gpu import r05_tile_2d  # noqa: F401
from anatomy.gpu import r06_vector  # noqa: F401
from anatomy.gpu import r07_warp_tile  # noqa: F401
from anatomy.gpu import r08_wgmma  # noqa: F401
from anatomy.gpu import r09_larger_tile  # noqa: F401
from anatomy.gpu import r10_roles  # noqa: F401
from anatomy.gpu import r11_persistent  # noqa: F401
from anatomy.gpu import r12_tma_stores  # noqa: F401
from anatomy.gpu import r13_hilbert  # noqa: F401
from anatomy.gpu import r14_clusters  # noqa: F401
from anatomy.gpu import r15_shipped  # noqa: F401
