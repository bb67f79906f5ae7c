"Export and clean the notebooks, write README.md, stage the site; name every file that this changed and fail if there is one."
import os,shutil,subprocess,sys,tempfile
from pathlib import Path

root = Path(__file__).parent.parent
scripts = Path(sys.executable).parent
steps = [[scripts/'nbdev-export'], [sys.executable, 'tools/clean_nbs.py'], [sys.executable, 'tools/readme.py'], [scripts/'nbdev-proc-nbs']]

def snapshot():
    fs = [root/'README.md', *(root/'nbs').rglob('*'), *(root/'veloxquant_mlx').rglob('*')]
    return {f: f.read_bytes() for f in fs if f.is_file() and f.parent.name not in ('__pycache__', '.ipynb_checkpoints')}

def run():
    "Staging asks for a `quarto` and would download one; it never calls it, so an empty script will do"
    shutil.rmtree(root/'_proc', ignore_errors=True) # stage all: a page depends on the modules too, not only on its notebook
    with tempfile.TemporaryDirectory() as d:
        quarto = Path(d)/'quarto'
        quarto.write_text('#!/bin/sh\n')
        quarto.chmod(0o755)
        env = os.environ | {'PATH': os.pathsep.join([d, os.environ['PATH']])}
        for o in steps: subprocess.run(o, cwd=root, env=env, check=True)

if __name__ == '__main__':
    before = snapshot()
    run()
    after = snapshot()
    changed = sorted(f.relative_to(root) for f in before.keys() | after.keys() if before.get(f) != after.get(f))
    if changed: sys.exit('\n  '.join(['Out of step with the notebooks, now rewritten; look at them and commit:', *map(str, changed)]))
