# /// script
# [tool.marimo.display]
# theme = "system"
# ///
"""The marimo app of the explorer: controls in stages, then what the page says of their values."""

import marimo

app = marimo.App(width="medium", app_title="structmax", css_file="app.css")


@app.cell
def _():
    import marimo as mo

    from structmax.explore import pages

    given, query = mo.cli_args(), mo.query_params()
    fixed = {"run": given.get("run")}

    def layout(controls):
        """What is small side by side; what is wide below, on a line of its own."""
        broad = mo.ui.text | mo.ui.matrix | mo.ui.multiselect
        wide = {k: c for k, c in controls.items() if isinstance(c, broad)}
        rows = {k: c for k, c in controls.items() if isinstance(c, mo.ui.array)}
        small = [c for k, c in controls.items() if k not in wide and k not in rows]
        lines = [mo.hstack(small, wrap=True, justify="start", gap=1.5)] if small else []
        for label, row in rows.items():
            lines.append(mo.md(label))
            lines.append(mo.hstack(list(row), justify="start", gap=0.1))
        lines += [mo.Html(f'<div class="sx-wide">{one}</div>') for one in wide.values()]
        return mo.vstack(lines, gap=0.5) if lines else None

    def go(page):
        query.set("page", page)

    return fixed, given, go, layout, mo, pages, query


@app.cell
def _(given, pages, query):
    asked = query.get("page") or given.get("page")
    name = asked if asked in pages.NAMES else pages.NAMES[0]
    return (name,)


@app.cell
def _(go, mo, name, pages):
    def button(other):
        kind = "success" if other == name else "neutral"
        title = pages.page(other).TITLE
        return mo.ui.button(label=title, kind=kind, on_click=lambda _: go(other))

    buttons = mo.ui.array([button(other) for other in pages.NAMES])
    mo.vstack(
        [
            mo.hstack(list(buttons), wrap=True, justify="start", gap=0.3).style(
                {"padding-right": "2.5rem"}
            ),
            mo.md(pages.page(name).ABOUT),
        ]
    )
    return


@app.cell
def _(fixed, layout, mo, name, pages):
    first = mo.ui.dictionary(pages.controls(name, 0, mo.ui, fixed))
    layout(first)
    return (first,)


@app.cell
def _(first, fixed, layout, mo, name, pages):
    second = mo.ui.dictionary(pages.controls(name, 1, mo.ui, {**fixed, **first.value}))
    layout(second)
    return (second,)


@app.cell
def _(first, fixed, layout, mo, name, pages, second):
    before = {**fixed, **first.value, **second.value}
    third = mo.ui.dictionary(pages.controls(name, 2, mo.ui, before))
    layout(third)
    return (third,)


@app.cell
def _(first, fixed, mo, name, pages, second, third):
    mo.Html(pages.view(name, {**fixed, **first.value, **second.value, **third.value}))
    return


if __name__ == "__main__":
    app.run()
