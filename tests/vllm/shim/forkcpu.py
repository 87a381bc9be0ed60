"""vLLM plugin: engine processes are forked, not spawned.

On a CPU vLLM insists on `spawn`, so every engine process imports torch and vLLM anew, some twelve
seconds each. A fork inherits what the API server has already imported. Nothing has started a thread
pool by then, which is what would make a fork unsafe. The plugin must know nothing of speculation.
"""

import multiprocessing
import sys
from multiprocessing.context import BaseContext


def fork_context() -> BaseContext:
    """Stand in for `vllm.utils.system_utils.get_mp_context`."""
    return multiprocessing.get_context("fork")


def register() -> None:
    """Replace `get_mp_context` where it is defined and where modules have bound it by name."""
    from vllm.utils import system_utils

    system_utils.get_mp_context = fork_context
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and "get_mp_context" in vars(module):
            module.get_mp_context = fork_context
