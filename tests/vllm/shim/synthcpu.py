"""vLLM plugin: synthetic acceptance, and sampling at temperature above 0, on the CPU.

vLLM 0.32.0 can accept draft tokens at given rates (`"rejection_sample_method": "synthetic"`), which
its Triton kernels know. Their CPU stand-ins in `vllm.utils.cpu_triton_utils` only assert that the
mode is off, so the first request would kill the engine. Here are the two rejection kernels of
`vllm.v1.sample.rejection_sampler` for that mode, in plain Python; any other mode goes to the
stand-ins as before.

The third function mends a fault: the stand-in for `expand_kernel` fills an int64 copy of its output
and drops it. Per-token temperature, top-k and top-p are then whatever the memory held, and draft
tokens at a temperature above 0 are judged by chance.
"""

from __future__ import annotations

from typing import Any

import torch


def accept_at_given_rates(
    output: torch.Tensor,
    *,
    ends: torch.Tensor,
    draft: torch.Tensor,
    on_rejection: torch.Tensor,
    bonus: torch.Tensor,
    uniform: torch.Tensor,
    rates: torch.Tensor,
    chosen: torch.Tensor | None,
) -> None:
    """Write each request's accepted draft tokens, and the one token that the target adds.

    Args:
        output: one row per request, k + 1 columns; filled in place.
        ends: where each request's draft ends in the flat tensors, that is, a running total.
        draft: all drafted tokens, flat; -1 is padding, which is never accepted.
        on_rejection: the target's token in place of the first rejected one, flat.
        bonus: one token per request, for a draft that is accepted to its end.
        uniform: a number from [0, 1) per drafted token.
        rates: by position, the rate of acceptance given that all before were accepted.
        chosen: which requests to treat; None is all.
    """
    tokens, replacements = draft.tolist(), on_rejection.tolist()
    draws, rate_at, bonus_of = uniform.tolist(), rates.tolist(), bonus.flatten().tolist()
    start = 0
    for request, end in enumerate(ends.tolist()):
        if chosen is None or bool(chosen[request]):
            for position in range(end - start):
                at = start + position
                if tokens[at] >= 0 and draws[at] < rate_at[position]:
                    output[request, position] = tokens[at]
                else:
                    output[request, position] = replacements[at]
                    break
            else:
                output[request, end - start] = bonus_of[request]
        start = end


def register() -> None:
    """Put the three functions in the place of vLLM's; a second call changes nothing."""
    from vllm.utils import cpu_triton_utils as stand_ins

    if getattr(stand_ins, "synthcpu_registered", False):
        return
    stand_ins.synthcpu_registered = True
    greedy_before = stand_ins._rejection_greedy_sample_kernel_impl
    random_before = stand_ins._rejection_random_sample_kernel_impl

    # The parameters' names are vLLM's: it passes some of them by keyword.
    def greedy(
        output_token_ids: torch.Tensor,
        cu_num_draft_tokens: torch.Tensor,
        draft_token_ids: torch.Tensor,
        target_argmax: torch.Tensor,
        bonus_token_ids: torch.Tensor,
        is_greedy: torch.Tensor | None,
        max_spec_len: int,
        uniform_probs: torch.Tensor | None = None,
        synthetic_conditional_rates: torch.Tensor | None = None,
        SYNTHETIC_MODE: bool = False,  # noqa: N803
    ) -> None:
        if not SYNTHETIC_MODE:
            greedy_before(
                output_token_ids,
                cu_num_draft_tokens,
                draft_token_ids,
                target_argmax,
                bonus_token_ids,
                is_greedy,
                max_spec_len,
            )
            return
        assert uniform_probs is not None and synthetic_conditional_rates is not None
        accept_at_given_rates(
            output_token_ids,
            ends=cu_num_draft_tokens,
            draft=draft_token_ids,
            on_rejection=target_argmax,
            bonus=bonus_token_ids,
            uniform=uniform_probs,
            rates=synthetic_conditional_rates,
            chosen=is_greedy,
        )

    def random(
        output_token_ids: torch.Tensor,
        cu_num_draft_tokens: torch.Tensor,
        draft_token_ids: torch.Tensor,
        draft_probs: torch.Tensor | None,
        target_probs: torch.Tensor,
        bonus_token_ids: torch.Tensor,
        recovered_token_ids: torch.Tensor,
        uniform_probs: torch.Tensor,
        is_greedy: torch.Tensor,
        max_spec_len: int,
        vocab_size: int,
        synthetic_conditional_rates: torch.Tensor | None = None,
        NO_DRAFT_PROBS: bool = False,  # noqa: N803
        SYNTHETIC_MODE: bool = False,  # noqa: N803
    ) -> None:
        if not SYNTHETIC_MODE:
            random_before(
                output_token_ids,
                cu_num_draft_tokens,
                draft_token_ids,
                draft_probs,
                target_probs,
                bonus_token_ids,
                recovered_token_ids,
                uniform_probs,
                is_greedy,
                max_spec_len,
                vocab_size,
                NO_DRAFT_PROBS=NO_DRAFT_PROBS,
            )
            return
        assert synthetic_conditional_rates is not None
        accept_at_given_rates(
            output_token_ids,
            ends=cu_num_draft_tokens,
            draft=draft_token_ids,
            on_rejection=recovered_token_ids,
            bonus=bonus_token_ids,
            uniform=uniform_probs,
            rates=synthetic_conditional_rates,
            chosen=~is_greedy,
        )

    def expand(
        output: torch.Tensor,
        input_val: torch.Tensor,
        cu_num_tokens: torch.Tensor,
        replace_from: Any,
        replace_to: Any,
        MAX_NUM_TOKENS: int | None = None,  # noqa: N803
    ) -> None:
        counts = torch.diff(cu_num_tokens.long(), prepend=torch.zeros(1, dtype=torch.long))
        values = input_val.masked_fill(input_val == replace_from, replace_to)
        per_token = torch.repeat_interleave(values, counts)
        output[: per_token.numel()] = per_token.to(output.dtype)

    stand_ins._rejection_greedy_sample_kernel_impl = greedy
    stand_ins._rejection_random_sample_kernel_impl = random
    stand_ins._expand_kernel_impl = expand
