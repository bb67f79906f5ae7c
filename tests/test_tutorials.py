"Tutorials have a picture, a run time, links and commands that exist; the toy of `write_a_method` passes the suite of the real methods."
import json,os,re,shlex,subprocess,sys
from pathlib import Path
import pytest
from typer.main import get_command

root = Path(__file__).parent.parent
tutorials = sorted((root/'nbs/tutorials').glob('*.ipynb'))
each = pytest.mark.parametrize('p', tutorials, ids=lambda p: p.stem)
with_front_page = pytest.mark.parametrize('p', [root/'nbs/index.ipynb', *tutorials], ids=lambda p: p.stem)

def cells(p, kind): return [c for c in json.loads(p.read_text())['cells'] if c['cell_type']==kind]
def src(c): return ''.join(c['source'])
def prose(p): return '\n'.join(map(src, cells(p, 'markdown')))

@each
def test_picture(p): assert any('image/png' in o.get('data', {}) for c in cells(p, 'code') for o in c['outputs'])

@each
def test_run_time_is_stated(p): assert re.search(r'^\*Run time: (seconds|under a minute)\b.*\*$', prose(p), re.M)

@with_front_page
def test_links(p):
    gone = [l for l in re.findall(r'\]\(([^):#]+)\)', prose(p)) if not (p.parent/l).exists()]
    assert not gone

@with_front_page
def test_named_files(p):
    gone = [f for f in re.findall(r'`((?:nbs|tests|tools)/[\w/.]+)`', prose(p)) if not (root/f).exists()]
    assert not gone

@with_front_page
def test_commands_are_accepted(p):
    "Parsed, not run"
    from veloxquant_mlx.cli import app
    for block in re.findall(r'^```sh\n(.*?)^```', prose(p), re.M|re.S):
        for line in block.splitlines():
            if not line.startswith('veloxquant '): continue
            name, *args = shlex.split(line, comments=True)[1:]
            get_command(app).commands[name].make_context(name, args)

def test_the_toy_passes_the_contract_suite(tmp_path):
    "The notebook's cells, up to those that take the method away again, are a plugin that registers it before tests are collected"
    cs = json.loads((root/'nbs/tutorials/write_a_method.ipynb').read_text())['cells']
    end = next(i for i,c in enumerate(cs) if src(c).startswith('## Leave no trace'))
    (tmp_path/'toy.py').write_text('\n\n'.join(src(c) for c in cs[:end] if c['cell_type']=='code'), encoding='utf-8')
    path = os.pathsep.join(filter(None, [str(tmp_path), str(root), os.environ.get('PYTHONPATH')]))
    r = subprocess.run([sys.executable, '-m', 'pytest', '-q', '-p', 'toy', '-p', 'no:cacheprovider', 'tests/contract', '-k', 'toy', '--tb', 'line'],
        cwd=root, env=os.environ|dict(PYTHONPATH=path, MPLBACKEND='agg'), capture_output=True, text=True)
    assert r.returncode==0, (r.stdout+r.stderr)[-2000:]
    assert int(re.search(r'(\d+) passed', r.stdout)[1])>50
