"nbdev-clean, then drop widget views: their model ids are random and mean nothing without a kernel."
from fastcore.nbio import read_nb, write_nb
from nbdev.clean import nbdev_clean
from nbdev.doclinks import nbglob

view = 'application/vnd.jupyter.widget-view+json'

def drop_views(fn):
    nb = read_nb(fn)
    outs = [o for c in nb.cells for o in c.get('outputs', []) if view in o.get('data', {})]
    for o in outs: del o['data'][view]
    if outs: write_nb(nb, fn)

if __name__ == '__main__':
    nbdev_clean.__wrapped__()
    for fn in nbglob(as_path=True): drop_views(fn)
