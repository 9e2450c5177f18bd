"""Checks of arguments before PyTorch is imported: a typing error must not take two seconds to report."""

from __future__ import annotations

from types import SimpleNamespace

from common.device_names import check_device, check_dtype
from common.errors import UserError, integer
from common.models.hub import RANDOM, local
from common.names import choice
from common.sampling.defaults import MODEL, NEUTRAL
from common.sampling.params import SamplingParams
from phases import check_phase, phase_named
from phases.commands.arguments import joined

FIRST_STEPS = 4
"""The first phase whose engine has steps: that requests can join, and that a trace shows."""


def check(given: SimpleNamespace) -> None:
    """Raise `UserError` for a command's wrong arguments, as far as these can be checked without PyTorch.

    Checked are phase, device, dtype, choices, model, server, and options of later phases.

    given: the arguments of any command; a check whose argument the command lacks is skipped. For `run`, this
        adds `prompts`, `params` and `said` (the sampling settings that were given).
    """
    asked = vars(given)
    phase = phase_named(given.phase) if "phase" in asked else None
    check_device(asked.get("device", "auto"))
    check_dtype(asked.get("dtype", "auto"))
    if "generation_config" in asked:
        choice("generation_config", given.generation_config, (MODEL, NEUTRAL))
    if "port" in asked:
        integer("port", given.port, low=0, high=65_535)
    if phase is not None and phase.number < FIRST_STEPS:
        for name, what in (("steps", "profiled"), ("port", "served")):
            if name in asked:
                raise UserError(
                    f"phases are {what} from {FIRST_STEPS:02d} on, but the phase is {phase.name}"
                )
    if "url" in asked:
        from benchmarks.loadtest.user import reach

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
        check_phase(phase, given.options)


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
