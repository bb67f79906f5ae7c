"Package metadata lives in settings.ini; nbdev's own settings and the fields it reads live in pyproject.toml."
from configparser import ConfigParser
from pathlib import Path
from setuptools import setup, find_namespace_packages

here = Path(__file__).parent
cfg = ConfigParser(delimiters=['='])
cfg.read_string((here/'settings.ini').read_text(encoding='utf-8'))
cfg = cfg['DEFAULT']
lib = cfg['lib_name']
statuses = ['1 - Planning', '2 - Pre-Alpha', '3 - Alpha', '4 - Beta', '5 - Production/Stable', '6 - Mature', '7 - Inactive']

setup(
    version=cfg['version'], author=cfg['author'], author_email=cfg['author_email'], license=cfg['license'],
    keywords=cfg['keywords'].split(),
    packages=find_namespace_packages(include=[lib, f'{lib}.*'], exclude=['*.__pycache__']), # namespace: `data` holds no module
    package_data={lib: ['data/*.safetensors']},
    classifiers=[f"Development Status :: {statuses[int(cfg['status'])-1]}", 'Programming Language :: Python :: 3'],
    install_requires=cfg['requirements'].split(), extras_require={o: cfg[f'{o}_requirements'].split() for o in ('cpu', 'cuda', 'lab', 'dev')},
    entry_points={'console_scripts': cfg['console_scripts'].split(), 'nbdev': [f'{lib}={lib}._modidx:d']},
    long_description=(here/'README.md').read_text(encoding='utf-8'), long_description_content_type='text/markdown')
