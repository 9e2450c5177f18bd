"""`ladder quantize`: a model in fewer bits, as a checkpoint that this and other engines read."""

from __future__ import annotations

from types import SimpleNamespace

from common.console import err, out
from common.device import pick_device
from common.errors import integer
from common.files import read_text
from common.models.hub import model_folder
from common.progress import bar
from common.text.tokenizer import Tokenizer
from forward.loading import load_model
from paged_cache.memory import weight_bytes
from phases.appendix.checkpoint_formats.calibrate import TEXT, blocks_of, samples
from phases.appendix.checkpoint_formats.export import check_source, check_target, export
from phases.appendix.checkpoint_formats.quantize import quantize_model
from quant.formats import SCHEMES

LONGEST_TEXT = 1 << 24


def run(given: SimpleNamespace) -> int:
    """Run `ladder quantize`: quantize a model, write it to a folder, and print the size; return the exit
    code.

    given: the arguments of the command line: model, folder, scheme, method and more.
    """
    model, folder = given.model, given.folder
    wanted = SCHEMES[given.scheme]
    if wanted.scales == "group":
        wanted = wanted.with_group(given.group_size)
    integer("pieces", given.pieces, low=1, high=1 << 16)
    integer("length", given.length, low=16, high=1 << 16)
    where = pick_device(given.device)
    check_target(folder)  # now, not after an hour of work
    reads = given.method != "rtn"
    text = read_text(given.calibration or TEXT, "--calibration", LONGEST_TEXT) if reads else ""
    source = model_folder(model)
    check_source(source)
    loaded = load_model(str(source), device=str(where), dtype="float32")
    tokens = Tokenizer(source).encode(text) if reads else []
    texts = samples(tokens, given.pieces, min(given.length, loaded.max_len)) if reads else []
    before = weight_bytes(loaded)
    with bar(f"{model} to {given.scheme} by {given.method}", len(blocks_of(loaded))) as part:
        quantize_model(loaded, wanted, given.method, texts, part)
    export(loaded, source, folder)
    err.print(
        f"weights: {before / 1e6:,.0f} MB in float32, now {weight_bytes(loaded) / 1e6:,.0f} MB"
    )
    out.out(str(folder), highlight=False)
    return 0
