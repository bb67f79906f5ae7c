"""Screenshots of the dashboards, light and dark, into `_screenshots`; `--keep` also renews the ones that the docs show.

    python tools/screenshots.py [--keep]
"""
import sys, tempfile
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.browser import PANELS, chromium, chromium_path, lab, new_page, root, voila

def main(keep:bool):
    if not chromium_path(): sys.exit('Chromium not found: apt-get install chromium')
    out = root/'_screenshots'
    out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as home, lab(Path(home)) as url, chromium() as browser:
        for name in PANELS:
            for theme in 'light', 'dark':
                with new_page(browser) as (pg, errors):
                    voila(pg, url, name, theme)
                    pg.wait_for_timeout(500)
                    path = out/f'{name}_{theme}.png'
                    pg.screenshot(path=path, full_page=True)
                    if keep and theme=='light': pg.screenshot(path=root/f'nbs/dashboards/{name}.jpg', full_page=True, type='jpeg', quality=60) # small: the docs show it
                    print(f'{path.relative_to(root)}  {path.stat().st_size//1000} kB', *errors)

if __name__=='__main__': main('--keep' in sys.argv[1:])
