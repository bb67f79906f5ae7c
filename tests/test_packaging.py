from configparser import ConfigParser
from importlib.metadata import version, entry_points
from pathlib import Path
import runpy,setuptools,tomllib
import pytest, veloxquant_mlx

root = Path(__file__).parent.parent
lib = root/'veloxquant_mlx'
ini = ConfigParser(delimiters=['=']); ini.read(root/'settings.ini'); ini = ini['DEFAULT']
proj = tomllib.loads((root/'pyproject.toml').read_text())['project']

@pytest.fixture
def setup_args(monkeypatch):
    "What setup.py hands to setuptools"
    args = {}
    monkeypatch.chdir(root) # `find_namespace_packages` looks in the working directory
    monkeypatch.setattr(setuptools, 'setup', lambda **kw: args.update(kw))
    runpy.run_path(str(root/'setup.py'))
    return args

def test_one_version(): assert veloxquant_mlx.__version__ == ini['version'] == version('veloxquant_mlx')
def test_one_description(): assert proj['description'] == ini['description']
def test_one_python(): assert proj['requires-python'] == f">={ini['min_python']}"
def test_one_license(): assert (root/'LICENSE').read_text().startswith(f"{ini['license']} License")
def test_nbdev_index_is_registered(): assert any(o.name==ini['lib_name'] for o in entry_points(group='nbdev'))

def test_every_file_ships(setup_args):
    "Modules through their packages, all else through `package_data`"
    patterns = setup_args['package_data'][lib.name]
    assert 'data/*.safetensors' in patterns
    data = {f for p in patterns for f in lib.glob(p)}
    for f in lib.rglob('*'):
        if f.is_dir() or f.suffix=='.pyc' or f.name.startswith('.'): continue
        package = '.'.join(f.parent.relative_to(root).parts)
        assert f in data or (f.suffix=='.py' and package in setup_args['packages']), f'{f.relative_to(root)} is not in the wheel'
