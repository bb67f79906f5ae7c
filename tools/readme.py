"README.md from nbs/index.ipynb, without Quarto"
import re
from pathlib import Path
from nbdev.process import NBProcessor

def render(nbp='nbs/index.ipynb'):
    res = []
    for c in NBProcessor(nbp, rm_directives=False).nb.cells:
        d,src = c.directives_,c.source
        if 'hide' in d or not src.strip(): continue
        src = '\n'.join(l for l in src.splitlines() if not l.startswith('#|')).strip()
        if c.cell_type=='markdown':
            res.append(re.sub(r'\]\((?!\w+:|[#/])', '](nbs/', src)) # links of the page, seen from the root
            continue
        if d.get('echo')!='false': res.append(f'```python\n{src}\n```')
        for o in c.get('outputs', []):
            txt = o.get('text') or o.get('data',{}).get('text/plain','')
            if txt: res.append('    ' + ''.join(txt).rstrip().replace('\n','\n    '))
    return '\n\n'.join(res)+'\n'

if __name__=='__main__': Path('README.md').write_text(render())
