# What there is to run. `just` alone lists it.

default:
    @just --list

# Everything; engine tests are skipped, visibly, without an engine and the image.
test *arguments:
    pytest {{ arguments }}

# Style, and nothing but style.
lint:
    ruff check .
    ruff format --check .

# The types of the module, the demo, the checks and what runs in the box.
types:
    mypy

# Build the job image and check it against its labels.
image *arguments:
    pidispatch build-image {{ arguments }}
    pidispatch verify-image pi-job:latest

# One delivery, two replicas, two diffs; no credentials.
demo:
    pidispatch demo

# One file that needs no Python: dist/pidispatch, and its tests.
binary:
    .ci/binary
    PIDISPATCH_BINARY=dist/pidispatch pytest -q tests/test_binary.py -m binary

# Measurements against peers, and one table (docs/benchmarks.md).
bench pairs="20" *arguments:
    pytest tests/bench -m bench --bench-pairs={{ pairs }} {{ arguments }}

# Kill the service again and again under load, on the real engine; half an hour or so.
torture rounds="200":
    pytest -s tests/test_torture.py --rounds={{ rounds }}

# A minute at a hundred deliveries a second, with everything else going on.
load seconds="60":
    pytest -s tests/test_load.py --load-seconds={{ seconds }}

# Fuzz all that reads what others send; led by coverage with `pip install atheris`.
fuzz minutes="60" *arguments:
    python tests/fuzz_long.py --minutes {{ minutes }} {{ arguments }}

# A hundred jobs one after another and forty at once, on the real engine; ten minutes.
many jobs="100" at_once="40":
    pytest -s tests/test_many.py --jobs={{ jobs }} --at-once={{ at_once }}

# Stop, kill and start again an engine of its own under jobs, as root; some minutes.
engine:
    pytest -m engine tests/test_engine_restart.py

# Write anew what the documents take from the code, and the golden prompts.
docs:
    UPDATE_GOLDEN=1 pytest -q tests/test_docs.py tests/test_prompts.py

# What CI runs, on a Debian machine, as root.
ci:
    .ci/run
