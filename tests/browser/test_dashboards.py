"The dashboards in a real browser: in JupyterLab and in Voilà, with the keyboard, wide and narrow, light and dark."
import os, re, signal, subprocess, sys, time, urllib.error, urllib.request
import pytest
from veloxquant_mlx.cli import PANELS
from tools.browser import chromium, chromium_path, drawn, lab, new_page, voila

pytest.importorskip('playwright.sync_api', reason='playwright is not installed')
pytestmark = pytest.mark.skipif(not chromium_path(), reason='no Chromium found: apt-get install chromium')
RUN_ALL = '''async () => {
  const app = window.jupyterapp; await app.restored;
  const w = app.shell.currentWidget; await w.context.ready; await w.sessionContext.ready;
  await w.sessionContext.session.kernel.info;
  return await app.commands.execute('notebook:run-all-cells') }'''

@pytest.fixture(scope='module')
def server(tmp_path_factory):
    with lab(tmp_path_factory.mktemp('lab')) as url: yield url

@pytest.fixture(scope='module')
def browser(server): # which has its environment by then
    with chromium() as b: yield b

@pytest.fixture
def page(server, browser):
    "A page without errors in the end"
    with new_page(browser) as (pg, errors): yield pg
    assert not errors

def status(pg): return pg.locator('.vq-status, .vq-error').first.inner_text()
def wait_for(pg, text):
    pg.wait_for_function('t => [...document.querySelectorAll(".vq-status, .vq-error, .vq-answer, .vq-code")].some(o => o.innerText.includes(t))', arg=text)
def choose(pg, description, value):
    "A value of the dropdown with that description"
    pg.locator(f'.widget-dropdown:has(label:text-is("{description}")) select').first.select_option(label=value)
def in_lab(pg, url, name):
    pg.goto(f'{url}/lab/tree/{name}.ipynb?reset', wait_until='domcontentloaded')
    pg.wait_for_selector('.jp-Notebook .jp-Cell')
    assert pg.evaluate(RUN_ALL)
def use(pg, name):
    "Move controls, read what changes"
    pg.wait_for_selector('.vq-status')
    drawn(pg)
    if name=='selector':
        before = status(pg)
        handle = pg.locator('.widget-slider .noUi-handle').nth(1) # sequence length
        handle.focus()
        for _ in range(12): handle.press('ArrowRight')
        wait_for(pg, 'long context')
        assert status(pg)!=before and status(pg).startswith('kvquant')
        pg.get_by_role('button', name='Create and verify').click()
        wait_for(pg, 'tokens in one layer: predicted')
    elif name=='schedule':
        choose(pg, 'rule', 'first and last layers')
        pg.get_by_role('button', name='Set by rule').click()
        pg.wait_for_function('document.querySelector(".vq-status").innerText.includes("[8, 8, ")')
        pg.locator('textarea').fill('[2, 99]')
        pg.locator('textarea').blur()
        pg.get_by_role('button', name='Read').click()
        wait_for(pg, 'bit_width_inlier must')
        assert pg.locator('.vq-error').count()==1
    else:
        choose(pg, 'method', 'h2o')
        wait_for(pg, '128 of 512 tokens are there')
        pg.get_by_role('checkbox').first.check()
        wait_for(pg, 'snap_budget')
        drawn(pg, 2)

@pytest.mark.parametrize('where', [in_lab, voila], ids=['lab', 'voila'])
@pytest.mark.parametrize('name', PANELS)
def test_panel(page, server, name, where, tmp_path):
    where(page, server, name)
    use(page, name)
    assert 'Traceback' not in page.locator('body').inner_text()
    page.screenshot(path=tmp_path/'panel.png')
    assert (tmp_path/'panel.png').stat().st_size>20_000

@pytest.mark.parametrize('name', PANELS)
def test_keyboard_widths_and_themes(page, server, name):
    voila(page, server, name)
    reached = set()
    for _ in range(60):
        page.keyboard.press('Tab')
        reached.add(page.evaluate('document.activeElement.tagName+"."+document.activeElement.className'))
    assert any('noUi-handle' in o for o in reached) or any(o.startswith('SELECT') for o in reached)
    assert any(o.startswith('BUTTON') for o in reached)
    for theme in 'light', 'dark':
        voila(page, server, name, theme)
        ink, paper = page.evaluate('''() => { const s = o => getComputedStyle(o); return [s(document.querySelector(".vq-status")).color, s(document.body).backgroundColor] }''')
        light = [sum(map(int, re.findall(r'\d+', o)[:3])) for o in (ink, paper)]
        assert abs(light[0]-light[1])>300, (theme, ink, paper) # of 765
        for width in 1280, 768:
            page.set_viewport_size(dict(width=width, height=1000))
            page.wait_for_timeout(300)
            wide = page.evaluate('[...document.querySelectorAll(".vq-status, img.widget-image, .widget-button")].map(o => o.getBoundingClientRect().right)')
            assert max(wide)<=width+1, (theme, width, wide)

def test_a_newcomer_runs_the_first_tutorial(page, server):
    in_lab(page, server, 'tutorials/first_compression')
    page.wait_for_function('document.querySelectorAll(".jp-OutputArea-output img").length>=1')
    assert page.locator('.jp-RenderedText[data-mime-type="application/vnd.jupyter.stderr"]:has-text("Traceback")').count()==0
    assert page.locator('.jp-OutputArea-output:has-text("Traceback (most recent call last)")').count()==0

def test_the_command_asks_for_its_token():
    "`veloxquant dashboard` serves the panels on this machine to who has the token"
    process = subprocess.Popen([sys.executable, '-c', 'from veloxquant_mlx.cli import main; main()', 'dashboard', 'selector', '--no-browser', '--port', '8866'], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True)
    try:
        seen = []
        for line in process.stderr:
            seen.append(line)
            if found := re.search(r'(http://127\.0\.0\.1:\d+)(/voila/render/selector\.ipynb)\?(token=\w+)', line): break
        else: raise AssertionError(''.join(seen))
        host, path, token = found.groups()
        time.sleep(1)
        def status(url):
            try:
                with urllib.request.urlopen(url) as r: return r.status, 'login' in r.url
            except urllib.error.HTTPError as e: return e.code, False
        assert status(f'{host}{path}') in ((403, False), (200, True))
        assert status(f'{host}/voila?{token}')==(200, False)
    finally:
        os.killpg(process.pid, signal.SIGTERM) # the server is a child of the command
        process.wait(30)
        process.stderr.close()
