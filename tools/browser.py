"JupyterLab and a browser for scripts: what the browser tests and `make screenshots` share."
import os, shutil, socket, subprocess, sys, time, urllib.request
from contextlib import contextmanager
from pathlib import Path
from veloxquant_mlx.cli import PANELS, panel_page

root = Path(__file__).parents[1]
FLAGS = '--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync'.split()

def chromium_path(): return next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)

@contextmanager
def lab(home:Path): # an empty folder, which it writes into
    "JupyterLab with the panels and a copy of the tutorials; its address"
    shutil.copytree(root/'nbs/tutorials', home/'tutorials')
    for n in PANELS: (home/f'{n}.ipynb').write_text(panel_page(n))
    settings = home/'settings/@jupyterlab/apputils-extension'
    settings.mkdir(parents=True)
    (settings/'notification.jupyterlab-settings').write_text('{"fetchNews":"false","checkForUpdates":false}') # its pop-up lies over the page
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    env = os.environ|dict(JUPYTERLAB_SETTINGS_DIR=str(home/'settings'), PYTHONPATH=str(root))
    args = '--no-browser', '--allow-root', '--ip=127.0.0.1', f'--port={port}', '--ServerApp.port_retries=0', '--IdentityProvider.token=', f'--ServerApp.root_dir={home}', '--expose-app-in-browser'
    with (home/'log').open('w') as log:
        process = subprocess.Popen([sys.executable, '-m', 'jupyterlab', *args], env=env, stdout=log, stderr=log, cwd=home)
        try:
            for _ in range(600):
                if process.poll() is not None: raise RuntimeError((home/'log').read_text())
                try: urllib.request.urlopen(f'http://127.0.0.1:{port}/api'); break
                except OSError: time.sleep(.2)
            yield f'http://127.0.0.1:{port}'
        finally:
            process.terminate()
            process.wait(30)

@contextmanager
def chromium():
    "A browser"
    from playwright.sync_api import sync_playwright
    blas = os.environ.pop('LD_PRELOAD', None) # Node does not start threads with it
    try:
        with sync_playwright() as p:
            b = p.chromium.launch(executable_path=chromium_path(), args=FLAGS)
            yield b
            b.close()
    finally:
        if blas: os.environ['LD_PRELOAD'] = blas

@contextmanager
def new_page(browser):
    "A page that reaches nothing but this machine, and the errors that happen on it"
    context, errors = browser.new_context(viewport=dict(width=1280, height=1000)), []
    pg = context.new_page()
    pg.set_default_timeout(180_000)
    pg.route('**/*', lambda r: r.continue_() if '127.0.0.1' in r.request.url else r.abort()) # Voilà's page waits for style sheets from elsewhere
    pg.on('pageerror', lambda e: errors.append(str(e)))
    yield pg, errors
    context.close()

def drawn(pg, n=1):
    "Wait until n pictures are really there"
    pg.wait_for_function('n => [...document.querySelectorAll("img.widget-image")].filter(o => o.complete && o.naturalWidth>300).length>=n', arg=n)

def voila(pg, url, name, theme='light'):
    "Open a panel alone"
    pg.goto(f'{url}/voila/render/{name}.ipynb?theme={theme}', wait_until='domcontentloaded')
    pg.wait_for_selector('.vq-status')
    drawn(pg)
