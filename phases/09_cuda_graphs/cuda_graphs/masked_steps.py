"""Overlap with masks: a step's forward pass is launched first, and its sampling when its masks are made.

The masks of a step depend on the tokens of the step before. While the device computes the forward pass, the
host waits for these tokens, and makes the masks.
"""

from __future__ import annotations

from common.request import Request
from continuous.engine import Engine
from continuous.runner import Forwarded, Pending, Results
from continuous.work import Work


def begin_masks(
    engine: Engine, step: Forwarded, previous: Pending
) -> tuple[Forwarded | None, Pending | None]:
    """Start to make a step's grammar masks, and append the tokens of the step before to their requests.

    step: its forward pass is launched, and nothing is sampled. previous: results of the step before.

    Returns:
        (`step`, None) if its masks are not ready, so that sampling is launched with the next step; (None,
        the pending results) if sampling is launched already; (None, None) if making the masks failed.
    """
    results = engine.wait(previous)
    sampled = {} if results is None else by_request(previous, results)
    begun: bool | BaseException
    try:
        begun = engine.grammar_manager.begin(step.works, sampled)
    except BaseException as error:  # the step before is collected all the same
        begun = error
    if results is not None:
        engine.append_tokens(previous, results)
    if isinstance(begun, BaseException):
        engine.fail(step.works, begun)
        if not isinstance(begun, Exception):
            raise begun
        return None, None
    return (None, engine.sample(step)) if begun else (step, None)


def unfinished(engine: Engine, works: list[Work]) -> list[Work]:
    """Return the works (one request's tokens in a step) whose requests have not ended since scheduling.

    For each of the others `Scheduler.finish_step` is called, which counts its tokens as not computed.
    """
    left = []
    for work in works:
        if any(
            request.finish_reason is None
            for request in work.sampled_requests or (work.request,)
        ):
            left.append(work)
        else:
            engine.scheduler.finish_step(work, computed=False)
    return works if len(left) == len(works) else left


def by_request(pending: Pending, results: Results) -> dict[Request, list[int]]:
    """Return the sampled token ids of a step by request, without tokens whose logits were NaN.

    pending: the step. results: what it sampled, a list of (token id, log-probabilities) for each request.
    """
    sampled_requests = (request for work in pending.works for request in work.sampled_requests)
    pairs = zip(sampled_requests, results, strict=True)
    return {request: [token for token, _ in given if token >= 0] for request, given in pairs}
