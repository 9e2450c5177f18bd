#!/usr/bin/env bash
# Triton's interpreter: a mask that joins a block's comparison with a scalar's.
# Expected: `(i < SIZE) & (scalar >= 0)` is a mask of booleans, as in compiled kernels, and the store takes it.
# Instead: splatting a scalar's comparison makes integers of it, and from 3.9.0 on the store refuses them:
#   "mask has unsupported dtype". `tl.where(scalar >= 0, i < SIZE, False)` works, compiled and interpreted.
# Known since: triton 3.9.0 (3.7.1 takes the integers). 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet numpy==2.4.6 torch==2.13.0
"$folder/env/bin/python" -m pip install --quiet --no-deps triton==3.9.0  # torch may ask for another
cat > "$folder/mask.py" <<'PY'
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def store(out, scalar, SIZE: tl.constexpr, BY_WHERE: tl.constexpr):
    i = tl.arange(0, 8)
    if BY_WHERE:
        mask = tl.where(scalar >= 0, i < SIZE, False)
    else:
        mask = (i < SIZE) & (scalar >= 0)
    tl.store(out + i, 1, mask=mask)


print(f"triton {triton.__version__}, torch {torch.__version__}")
said = {}
for by_where in (True, False):
    out = torch.zeros(8, dtype=torch.int32)
    try:
        store[(1,)](out, 5, SIZE=6, BY_WHERE=by_where)
        said[by_where] = str(out.tolist())
    except Exception as error:
        said[by_where] = f"{type(error).__name__}: {error}"
    print("tl.where:" if by_where else "&:       ", said[by_where])
if said[True] != "[1, 1, 1, 1, 1, 1, 0, 0]" or "unsupported dtype" not in said[False]:
    sys.exit("the behaviour has changed")
PY
TRITON_INTERPRET=1 "$folder/env/bin/python" "$folder/mask.py"
