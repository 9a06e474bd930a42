"""Names of environment variables that NCCL, PyTorch and Gloo read, and what old names became."""

from collections.abc import Mapping

from paceline.catalog.load import read_shipped
from paceline.check.lint.words import words_of

RENAMED: Mapping[str, tuple[str, str]] = {
    old: (new, since)
    for old, (new, since) in read_shipped("software.toml")["environment"]["renamed"].items()
}
"""Old name -> what is read instead, since when. The first six and the flight recorder's are still
read by torch, which warns (ProcessGroupNCCL.hpp, Utils.hpp `getCvarInt` lists); NCCL's own are
in its user guide's list of variables."""

STILL_READ = frozenset(
    {
        "NCCL_MAX_NCHANNELS",
        "NCCL_MIN_NCHANNELS",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
    }
)
"""Old names that work as before."""

OTHER_VALUES = frozenset(
    {"NCCL_TREE_THRESHOLD", "NCCL_LL_THRESHOLD", "NCCL_RINGS", "NCCL_IB_CUDA_SUPPORT"}
)
"""Old names whose values mean something else under the new one."""

NCCL = words_of("environment", "nccl")
"""Variables of NCCL's user guide 2.28 and `NCCL_PARAM` in its sources, and what images name its
folders."""

TORCH_NCCL = words_of("environment", "torch_nccl")
"""Variables of ProcessGroupNCCL.hpp, torch 2.2 to 2.13."""

OTHERS = words_of("environment", "others")

PREFIXES = ("NCCL_", "TORCH_NCCL_", "CUDA_", "PYTORCH_", "GLOO_")
PLUGINS = (
    "NCCL_FASTRAK_",
    "NCCL_GPUDIRECTTCPX_",
    "NCCL_OFI_",
    "NCCL_SHIMNET_",
    "NCCL_GPU_",
    "NCCL_PROFILE_",
    "NCCL_INSPECTOR_",
    "NCCL_SHARP_",
    "NCCL_TESTS_",
)
"""Beginnings of the names that network and profiler plugins read."""
