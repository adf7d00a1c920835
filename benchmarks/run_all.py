"""Run every benchmark, one after another, each in a separate process."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

if __name__ == "__main__":
    for script in sorted(HERE.glob("*.py")):
        if script.stem not in ("run_all", "harness", "environments"):
            print(f"== {script.name}", flush=True)
            subprocess.run([sys.executable, str(script)], check=True)
