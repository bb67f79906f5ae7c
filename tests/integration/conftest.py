"One hook for the whole process: every test starts and ends without it."
import sys
from pathlib import Path
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

@pytest.fixture(autouse=True)
def no_hook():
    from veloxquant_mlx.engine.hook import uninstall
    uninstall()
    yield
    uninstall()
