"""Lines to paste, and a button that copies them."""

from __future__ import annotations


class CopyLines:
    """The lines to paste, and a button that copies them."""

    def __init__(self, text: str) -> None:
        import anywidget  # noqa: PLC0415 - slow to import
        import traitlets  # noqa: PLC0415

        class Lines(anywidget.AnyWidget):
            _esm = _COPY
            _css = _COPY_STYLE
            text = traitlets.Unicode().tag(sync=True)

        self.widget = Lines(text=text)

    def show(self, text: str) -> None:
        """Show other lines."""
        self.widget.text = text


# The clipboard's own interface is there only on a secure page; the older way works on every one.
_COPY = """
function render({ model, el }) {
  const box = document.createElement("details");
  const head = document.createElement("summary");
  head.textContent = "The lines that do this";
  const button = document.createElement("button");
  button.textContent = "Copy";
  button.type = "button";
  const lines = document.createElement("textarea");
  lines.readOnly = true;
  lines.setAttribute("aria-label", "The lines that do this");
  const show = () => {
    lines.value = model.get("text");
    lines.rows = Math.min(24, lines.value.split("\\n").length + 1);
  };
  button.addEventListener("click", async () => {
    lines.select();
    try { await navigator.clipboard.writeText(lines.value); }
    catch { document.execCommand("copy"); }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  model.on("change:text", show);
  show();
  box.append(head, button, lines);
  el.append(box);
  el.classList.add("megatrain-lines");
}
export default { render };
"""
_COPY_STYLE = """
.megatrain-lines { font: 13px/1.45 var(--jp-ui-font-family, system-ui, sans-serif); color: inherit; }
.megatrain-lines textarea { display: block; width: 100%; max-width: 940px; margin-top: 6px; box-sizing: border-box;
  font: 12px/1.4 var(--jp-code-font-family, monospace); color: inherit; background: rgba(128,128,128,.08);
  border: 1px solid rgba(128,128,128,.35); border-radius: 4px; padding: 6px; }
.megatrain-lines button { margin-top: 6px; padding: 2px 12px; color: inherit; background: rgba(128,128,128,.15);
  border: 1px solid rgba(128,128,128,.35); border-radius: 4px; cursor: pointer; }
"""
