"`pytest` reads the notebooks by nbdev's rules: its skip flags, no export while testing, cleaned execution counts."
import os,re
from pathlib import Path
from nbdev.config import get_config
from tools.blas import load_blas

root = Path(__file__).parent
os.environ['IN_TEST'] = '1'                                                     # `nbdev_export()` does nothing
os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, [str(root), os.environ.get('PYTHONPATH')]))  # kernels test this checkout
if blas := load_blas(): os.environ.setdefault('LD_PRELOAD', blas)               # for kernels; loading it did it for this process

flags = get_config(root).tst_flags
skip = re.compile(rf"^#\|\s*(?:eval:\s*false|(?:{'|'.join(flags.split() if isinstance(flags, str) else flags)}))\b", re.M)

def pytest_collection_modifyitems(items):
    for o in items:
        if type(o).__name__ != 'IPyNbCell': continue
        if skip.search(o.cell.source): o.options['skip'] = True
        # nbdev-clean empties the execution counts; nbval takes that for 'never run' and refuses the saved outputs
        if o.cell.execution_count is None: o.cell.execution_count = 0
