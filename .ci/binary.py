"""The entry of the one-file binary: pidispatch, or a script it starts in Python's name.

The demo runs the box's scripts as `python -I SCRIPT …`; in the binary there is no
other Python than itself.
"""

import os
import runpy
import sys
from pathlib import Path

# the loader's own library path is not for the programs that we start
original = os.environ.pop("LD_LIBRARY_PATH_ORIG", None)
os.environ.pop("LD_LIBRARY_PATH", None)
if original is not None:
    os.environ["LD_LIBRARY_PATH"] = original

# one file instead of six hundred, which every start would have to unpack
sys.path.append(str(Path(__file__).with_name("tzdata.zip")))

if sys.argv[1:2] == ["-I"]:
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    from pidispatch import main

    main()
