"""Primitive ops, one file per family."""

from barellm.program.ops.attention.attention import Attention, AttentionBackward, AttentionCached
from barellm.program.ops.attention.layout_attention import LayoutAttention, LayoutAttentionBackward
from barellm.program.ops.attention.qk_rotary import QKRotary, QKRotaryBackward
from barellm.program.ops.attention.rope import Rope
from barellm.program.ops.collectives import AddRanks, BeginExchange, EndExchange, Exchange, Gather, SumShares
from barellm.program.ops.convolution import Conv2d, Conv2dDw, Conv2dDx
from barellm.program.ops.cross_entropy import CrossEntropy, CrossEntropyBackward, TokenLosses
from barellm.program.ops.documents import BigramIds, CuSeqlens, DocumentStarts
from barellm.program.ops.embedding import Embedding, EmbeddingDwpe, EmbeddingDwte, LastRow
from barellm.program.ops.gemm.block_matmul import BlockMatmul, BlockMatmulDw, BlockMatmulDx
from barellm.program.ops.gemm.block_squares import BlockSquares
from barellm.program.ops.gemm.fp8 import Quantise, ScaledMatmul, ScaledMatmulDw, ScaledMatmulDx
from barellm.program.ops.gemm.matmul import Bias, BiasGrad, Matmul, MatmulDw, MatmulDx
from barellm.program.ops.gemm.quantized import QuantizedMatmul
from barellm.program.ops.norm.groupnorm import GroupNorm, GroupNormDparams, GroupNormDx
from barellm.program.ops.norm.layernorm import LayerNorm, LayerNormDparams, LayerNormDx
from barellm.program.ops.norm.rmsnorm import RMSNorm, RMSNormDweight, RMSNormDx
from barellm.program.ops.norm.softmax import Softmax, SoftmaxDx
from barellm.program.ops.optim.exponents import Exponents
from barellm.program.ops.optim.muon import (
    Gram,
    GramApply,
    GramPolynomial,
    MuonMomentum,
    MuonNormalize,
    MuonUpdate,
    NorMuonScales,
)
from barellm.program.ops.optim.optimizer import AdamW, CautiousAdam, ClipScale, SumSquares
from barellm.program.ops.optim.powersgd import Factor, Feedback, Householder
from barellm.program.ops.optim.scales import DelayedScale, FloatBias, Measure, Remember, RoundFloating
from barellm.program.ops.pointwise.binary import BinaryMatmul, PackSigns, StraightThrough, UnpackSigns
from barellm.program.ops.pointwise.dropout import Dropout, DropoutBackward, TauswortheDropout, TauswortheDropoutBackward
from barellm.program.ops.pointwise.elementwise import ACTIVATIONS, Add, Cast, Rescale, Zeros
from barellm.program.ops.pointwise.gates import Gated, GatedBackward, GateLogits, GateLogitsBackward
from barellm.program.ops.pointwise.mix import Mix, MixBackward
from barellm.program.ops.pointwise.random import ConstantInit, NormalInit, UniformInit
from barellm.program.ops.pointwise.swiglu import SwiGLU, SwiGLUBackward
from barellm.program.ops.pointwise.top_k import TopK, TopKDx
from barellm.program.ops.pointwise.transpose import Transpose
from barellm.program.ops.pooling import MeanPixels, MeanPixelsBackward
from barellm.program.ops.softcap import Softcap, SoftcapCrossEntropy, SoftcapCrossEntropyBackward

__all__ = [
    "ACTIVATIONS",
    "AdamW",
    "Add",
    "AddRanks",
    "Attention",
    "AttentionBackward",
    "AttentionCached",
    "BeginExchange",
    "Bias",
    "BiasGrad",
    "BigramIds",
    "BinaryMatmul",
    "BlockMatmul",
    "BlockMatmulDw",
    "BlockMatmulDx",
    "BlockSquares",
    "Cast",
    "CautiousAdam",
    "ClipScale",
    "ConstantInit",
    "Conv2d",
    "Conv2dDw",
    "Conv2dDx",
    "CrossEntropy",
    "CrossEntropyBackward",
    "CuSeqlens",
    "DelayedScale",
    "DocumentStarts",
    "Dropout",
    "DropoutBackward",
    "Embedding",
    "EmbeddingDwpe",
    "EmbeddingDwte",
    "EndExchange",
    "Exchange",
    "Exponents",
    "Factor",
    "Feedback",
    "FloatBias",
    "GateLogits",
    "GateLogitsBackward",
    "Gated",
    "GatedBackward",
    "Gather",
    "Gram",
    "GramApply",
    "GramPolynomial",
    "GroupNorm",
    "GroupNormDparams",
    "GroupNormDx",
    "Householder",
    "LastRow",
    "LayerNorm",
    "LayerNormDparams",
    "LayerNormDx",
    "LayoutAttention",
    "LayoutAttentionBackward",
    "Matmul",
    "MatmulDw",
    "MatmulDx",
    "MeanPixels",
    "MeanPixelsBackward",
    "Measure",
    "Mix",
    "MixBackward",
    "MuonMomentum",
    "MuonNormalize",
    "MuonUpdate",
    "NorMuonScales",
    "NormalInit",
    "PackSigns",
    "QKRotary",
    "QKRotaryBackward",
    "Quantise",
    "QuantizedMatmul",
    "RMSNorm",
    "RMSNormDweight",
    "RMSNormDx",
    "Remember",
    "Rescale",
    "Rope",
    "RoundFloating",
    "ScaledMatmul",
    "ScaledMatmulDw",
    "ScaledMatmulDx",
    "Softcap",
    "SoftcapCrossEntropy",
    "SoftcapCrossEntropyBackward",
    "Softmax",
    "SoftmaxDx",
    "StraightThrough",
    "SumShares",
    "SumSquares",
    "SwiGLU",
    "SwiGLUBackward",
    "TauswortheDropout",
    "TauswortheDropoutBackward",
    "TokenLosses",
    "TopK",
    "TopKDx",
    "Transpose",
    "UniformInit",
    "UnpackSigns",
    "Zeros",
]
