from configparser import ConfigParser
from importlib.metadata import version, entry_points
from pathlib import Path
import tomllib, veloxquant_mlx

root = Path(__file__).parent.parent
ini = ConfigParser(delimiters=['=']); ini.read(root/'settings.ini'); ini = ini['DEFAULT']
proj = tomllib.loads((root/'pyproject.toml').read_text())['project']

def test_one_version(): assert veloxquant_mlx.__version__ == ini['version'] == version('veloxquant_mlx')
def test_one_description(): assert proj['description'] == ini['description']
def test_one_python(): assert proj['requires-python'] == f">={ini['min_python']}"
def test_nbdev_index_is_registered(): assert any(o.name==ini['lib_name'] for o in entry_points(group='nbdev'))
