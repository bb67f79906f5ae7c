"""Fit the two codebooks that ship with the package: `python tools/fit_nsn_codebooks.py`

They depend on synthetic normal samples and a seed only, on no model and no data (nbs/methods/nsnquant.ipynb). The method checks
the file's content against `CODEBOOK_HASH`; after a change of the fit, put the hash that this prints there."""
from pathlib import Path
import mlx.core as mx
from veloxquant_mlx.core.artifacts import content_hash
from veloxquant_mlx.methods.nsnquant import NSNQuantOptions, fit_codebook

dest = Path(__file__).parent.parent/'veloxquant_mlx/data/nsn_codebooks.safetensors'

def main():
    mx.set_default_device(mx.cpu)
    o = NSNQuantOptions()
    arrays = {f'bits{b}': mx.array(fit_codebook(b, o.nsn_codebook_size, o.nsn_subvector_dim, o.nsn_seed)).astype(mx.float16) for b in (1,2)}
    mx.save_safetensors(str(dest), arrays)
    print(f"{dest.name}: {dest.stat().st_size} bytes, content hash {content_hash(arrays)}")

if __name__=='__main__': main()
