"""The lesson names what must be read, and that is little enough for one sitting."""

import re

from phases import ROOT

LESSON = ROOT / "phases" / "06_triton_paged_attention" / "README.md"
MOST_LINES = 700


def test_what_must_be_read_is_read_in_one_sitting() -> None:
    text = LESSON.read_text(encoding="utf-8")
    listed = text[text.index("<!-- must read -->") : text.index("<!-- /must read -->")]
    files = [LESSON.parent / link for link in re.findall(r"\]\((\S+\.py)\)", listed)]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert len(files) >= 4, "the list of what must be read is empty"
    assert lines <= MOST_LINES, f"{lines} lines must be read, but {MOST_LINES} is what a sitting takes"
