"""Write the pages of ``docs/reference``."""

from __future__ import annotations

from docs.generate.pages import FOLDER, text_of_all

for name, text in text_of_all().items():
    (FOLDER / name).write_text(text)
