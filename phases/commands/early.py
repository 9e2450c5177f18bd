"""Checks of arguments before PyTorch is imported: a typing error must not take two seconds to report."""

from __future__ import annotations

import socket
from types import SimpleNamespace

from common.device_names import check_device, check_dtype
from common.errors import UserError, choice, integer
from common.models.hub import RANDOM, local
from common.sampling.defaults import MODEL, NEUTRAL
from common.sampling.params import SamplingParams
from phases import check_phase, first_phases, phase_named
from phases.commands.arguments import METHODS, SCHEMES, joined

FIRST_STEPS = 4
"""The phase whose engine marks its steps in a trace."""
PATIENCE = 10.0
"""Seconds after which a server that does not respond is taken to be absent."""
CHOICES = {"scheme": SCHEMES, "method": METHODS, "generation_config": (MODEL, NEUTRAL)}


def check(given: SimpleNamespace) -> None:
    """Raise `UserError` for a command's arguments that are wrong, as far as that shows without PyTorch.

    These are phase, device, dtype, choices, model, server, and options of later phases.

    given: the arguments of any command; those that it does not have are skipped. For `run`, `prompts`,
        `params` and `said` (the sampling settings that were given) are added.
    """
    asked = vars(given)
    phase = phase_named(given.phase) if "phase" in asked else None
    check_device(asked.get("device", "auto"))
    check_dtype(asked.get("dtype", "auto"))
    for name, allowed in CHOICES.items():
        if name in asked:
            choice(name, asked[name], allowed)
    if "port" in asked:
        integer("port", given.port, low=0, high=65_535)
    if phase is not None and "steps" in asked and phase.number < FIRST_STEPS:
        raise UserError(
            f"steps are profiled from phase {FIRST_STEPS:02d} on, but the phase is {phase.name}"
        )
    if "url" in asked:
        reach(given.url)
    model = asked.get("model")
    if model is not None and not model.startswith(RANDOM):
        local(model)
    if "prompt" in asked:
        _read(given)
        if str(model).startswith(RANDOM):
            raise UserError(
                f"model is {model!r}, but `ladder run` needs a model with a tokenizer"
            )
    if phase is not None and asked.get("options"):
        check_phase(phase, given.options, first_phases())


def _read(given: SimpleNamespace) -> None:
    from phases.commands.engines import read_prompts
    from phases.commands.grammars import chosen_grammar

    said = {name: getattr(given, name) for name in ("temperature", "top_k", "top_p")}
    given.said = {name: value for name, value in said.items() if value is not None}
    given.params = SamplingParams(
        max_tokens=given.max_tokens,
        seed=given.seed,
        grammar=chosen_grammar(
            given.json_schema, given.regex, joined(given.choice), given.grammar
        ),
        **given.said,
    )
    given.prompts = read_prompts(given.prompt, given.prompts_file)


def reach(url: str) -> None:
    """Raise `UserError` if `url` is no address, or no server listens at it."""
    from benchmarks.loadtest.user import Target

    target = Target.of(url)
    try:
        socket.create_connection((target.host, target.port), PATIENCE).close()
    except OSError as error:
        raise UserError(
            f"no server answers at {url} ({error.strerror or error}): "
            "start one with `ladder serve`, or mend the address"
        ) from None
