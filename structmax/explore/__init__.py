"""The explorer: pages in the browser where one moves scores and watches the answers.

``serve`` starts it. A page is a module with what :class:`structmax.explore.pages.Page` lists; what
it computes and draws is plain functions of plain values. Only ``app.py`` imports marimo.
"""
