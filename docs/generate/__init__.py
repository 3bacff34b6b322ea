"""The pages of ``docs/reference``, made from the tables in the code: ``make docs`` writes them, a test compares them.

A page is a function that returns markdown; :data:`docs.generate.pages.PAGES` names them all.
"""
