"""vLLM plugin: engines, and first looks at models, do not import torch and vLLM anew for 12 seconds.

On a CPU vLLM insists on `spawn` for its engines. A fork inherits what the API server has already
imported; nothing has started a thread pool by then, which is what would make a fork unsafe. And for
the first look at each kind of model vLLM starts a process, lest CUDA be initialized in this one; here
is no CUDA. The plugin must know nothing of speculation.
"""

import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import TypeVar

T = TypeVar("T")


def fork_context() -> BaseContext:
    """Stand in for `vllm.utils.system_utils.get_mp_context`."""
    return multiprocessing.get_context("fork")


def here(look: Callable[[], T]) -> T:
    """Stand in for `vllm.model_executor.models.registry._run_in_subprocess`."""
    return look()


def register() -> None:
    """Replace both; `get_mp_context` also where modules have bound it by name."""
    from vllm.model_executor.models import registry
    from vllm.utils import system_utils

    registry._run_in_subprocess = here
    system_utils.get_mp_context = fork_context
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and "get_mp_context" in vars(module):
            module.get_mp_context = fork_context
