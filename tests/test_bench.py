"The benchmark script on a CPU: with array operations, with every kernel in the emulator, and with kernels that fail."
import json,runpy
from pathlib import Path
import mlx.core as mx, pytest
from emulated import emulated
from veloxquant_mlx.kernels.runtime import Backend, use_backend

main = runpy.run_path(str(Path(__file__).parent.parent/'bench/kernels.py'))['main']

@pytest.fixture(autouse=True)
def on_cpu():
    old = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(old)

def bench(backend, tmp_path, *args):
    "Exit code, figures, rows by name"
    with use_backend(backend): code = main([*args, '--json', str(tmp_path/'bench.json')])
    found = json.loads((tmp_path/'bench.json').read_text())
    return code, found, {r['what']: r for r in found['rows']}

def test_array_operations(tmp_path, capsys):
    code, found, rows = bench(None, tmp_path, '--lengths', '64', '2x32')
    out = capsys.readouterr().out
    assert code==0 and found['ok'] and found['backend'] is None
    assert 'no GPU kernels' in out and found['device'] in out and all(len(l)<=110 for l in out.splitlines())
    assert not any(r['kernel'] or 'problem' in r for r in found['rows'])
    assert all(r['seconds']>0 and r['bytes']>0 for r in found['rows'])
    r = rows['affine 4 bit']
    assert {'fp16', 'host', 'total', 'share'}<=r.keys() and r['error']<2e-3
    assert rows['turboquant_rvq 4 bit']['lm32']>0 and 'error' not in rows['gather_rows, half']
    assert [m['what'].split()[0] for m in found['memory']]==['turboquant_rvq', 'kivi', 'kvquant', 'gear']
    assert all(m['peak']>=m['allocated']>=m['used']>0 for m in found['memory'])

def test_kernels_in_the_emulator(tmp_path):
    code, found, rows = bench(emulated(), tmp_path, '--lengths', '160')
    assert code==0, [r['problem'] for r in found['rows'] if 'problem' in r]
    ours = [r for r in found['rows'] if 'mlx' not in r['what']]
    assert len(ours)==17 and all(r['kernel'] for r in ours)
    assert all(r['error']<2e-3 for r in ours) and rows['group_pack 4 bit token']['error']==0

def test_parts(tmp_path):
    _, found, rows = bench(None, tmp_path, '--lengths', '32', '--only', 'memory', '--methods', 'kivi')
    assert not rows and [m['what'] for m in found['memory']]==['kivi 2 bit']

def test_failures_are_rows(tmp_path, capsys):
    def launch(*args): raise RuntimeError('does not compile')
    code, found, rows = bench(Backend('broken', launch), tmp_path, '--lengths', '32', '--only', 'encode', 'methods', '--methods', 'kivi')
    assert code==1 and not found['ok']
    assert 'does not compile' in rows['group_pack 4 bit token']['problem'] and 'does not compile' in rows['kivi 2 bit']['problem']
    assert 'seconds' in rows['mlx fp16 sdpa'] and 'failed' in capsys.readouterr().out
