"""The fuzzer for an hour: led by coverage where atheris is, else at random.

Ends with 1 when anything was found; each finding is a case and a traceback in the
folder of findings. `tests/test_fuzz.py` is where a finding goes for good.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "image")]

try:
    import atheris
except ImportError:
    atheris = None

with contextlib.ExitStack() as _instrumented:
    if atheris:
        counted = atheris.instrument_imports(include=["pidispatch", "markdown_it"])
        _instrumented.enter_context(counted)
    import markdown_it  # noqa: F401 - else imported later, and uncounted
    from fuzz import MOST, TARGETS, Findings, Fuzzer, Mutator, Targets, seeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--real", type=Path, help="a folder of real deliveries")
    parser.add_argument("--findings", type=Path, default=ROOT / "fuzz-findings")
    asked = parser.parse_args()
    print(f"fuzz: seed {asked.seed}, {'atheris' if atheris else 'no atheris'}")
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    wanted = asked.targets.split(",")
    found = [case for case in seeds(root, asked.real) if case.words[0] in wanted]
    fuzzer = Fuzzer(Targets(root), Findings(asked.findings), Mutator(found))
    if atheris:
        led(fuzzer, root, asked)
    rng = random.Random(asked.seed)
    while time.monotonic() - fuzzer.begun < asked.minutes * 60:
        fuzzer.one(fuzzer.mutator(fuzzer.mutator.any(rng), rng).encode())
    fuzzer.tell()
    sys.exit(bool(fuzzer.findings.seen))


def led(fuzzer: Fuzzer, root: Path, asked: argparse.Namespace) -> None:
    """By coverage; libFuzzer ends the process itself."""
    corpus = root / "corpus"
    corpus.mkdir()
    for n, case in enumerate(fuzzer.mutator.seeds):
        (corpus / f"seed-{n}").write_bytes(case.encode())
    options = {
        "max_len": MOST,
        "max_total_time": int(asked.minutes * 60),
        "seed": asked.seed,
        "len_control": 0,
        "rss_limit_mb": 4096,
        "print_final_stats": 1,
        "artifact_prefix": f"{asked.findings}/",
    }
    arguments = [f"-{name}={value}" for name, value in options.items()]
    atheris.Setup(
        [sys.argv[0], str(corpus), *arguments],
        fuzzer.one,
        custom_mutator=fuzzer.mutate,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
