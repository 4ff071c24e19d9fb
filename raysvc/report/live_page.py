"""`raysvc top --web`: a page that shows the newest look at the servers and builds of a cluster, and the charts of their runs so far.

Always true:
- it listens on this machine alone, and answers nobody who does not have the token of its address;
- it only reads: every method but GET is refused;
- text of the cluster is set as text, never as markup.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from raysvc.report.page import STYLE, page_file

Look = Callable[[], dict[str, Any]]
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
LIVE_STYLE = """
.wide{overflow-x:auto}.wide td,.wide th{padding:4px 6px;font-size:12px;overflow-wrap:break-word}.wide td:first-child{overflow-wrap:anywhere}#state{color:var(--soft)}
@media(max-width:45rem){body{padding:12px}.wide thead{display:none}.wide tr{display:block;margin-bottom:1rem;border-bottom:2px solid var(--line)}
.wide td{display:flex;justify-content:space-between;gap:1rem}.wide td::before{content:attr(data-name);color:var(--soft)}}
"""
SCRIPT = """
function fill(id, rows){
  const table = document.getElementById(id); table.replaceChildren();
  if(!rows.length){ table.insertRow().insertCell().textContent = "none"; return; }
  const head = table.createTHead().insertRow(), names = Object.keys(rows[0]).filter((name) => rows.some((row) => row[name] !== "-"));
  for(const name of names){ const cell = document.createElement("th"); cell.textContent = name; head.append(cell); }
  const body = table.createTBody();
  for(const row of rows){ const line = body.insertRow(); for(const name of names){ const cell = line.insertCell(); cell.textContent = row[name]; cell.dataset.name = name; } }
}
const sections = {}, plots = {}, reports = {};
function element(kind, parent, text){ const made = document.createElement(kind); made.textContent = text; parent.append(made); return made; }
function plot(server, chart){
  const section = sections[server] ??= (() => {
    const made = document.getElementById("runs"); element("h2", made, "Run of " + server);
    const end = element("p", made, ""), grid = element("div", made, ""); grid.className = "grid2"; return {end, grid};
  })();
  const key = server + "/" + chart.title, names = chart.series.map((each) => each.name).join("/"), known = plots[key];
  if(known?.names === names){ known.plot.setData(columns(chart)); return; }
  const figure = known?.figure ?? element("figure", section.grid, ""); figure.replaceChildren();
  element("figcaption", figure, chart.title);
  plots[key] = {names, figure, plot: draw(figure, chart)};
}
function say_ends(there){
  for(const [server, {end}] of Object.entries(sections)){
    end.textContent = there.includes(server) ? "" : "The run has ended, or its server has; its report: ";
    if(end.textContent) element("code", end, reports[server]);
  }
}
async function look(){
  const state = document.getElementById("state");
  try{
    const answer = await fetch("look.json", {cache: "no-store"});
    if(!answer.ok) throw new Error("answer " + answer.status);
    const found = await answer.json();
    fill("servers", found.servers); fill("builds", found.builds);
    for(const [server, charts] of Object.entries(found.charts)) for(const chart of charts) plot(server, chart);
    Object.assign(reports, found.reports); say_ends(Object.keys(found.charts));
    state.textContent = "as of " + new Date().toLocaleTimeString();
  }catch(error){ state.textContent = "no answer (" + error.message + "): raysvc top, or the cluster that it looks at, has ended"; say_ends([]); }
  setTimeout(look, 2000);
}
look();
"""


def _page() -> str:
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>raysvc top</title><style>{page_file("uplot/uPlot.min.css")}{STYLE}{LIVE_STYLE}</style></head>
<body><h1>raysvc top</h1><p id="state">asking the cluster</p><h2>Servers</h2><div class="wide"><table id="servers"></table></div>
<div id="runs"></div><h2>Builds in progress</h2><div class="wide"><table id="builds"></table></div>
<script>{page_file("uplot/uPlot.iife.min.js")}</script><script>{page_file("draw.js")}</script><script>{SCRIPT}</script></body></html>
"""


def page_server(look: Look, port: int = 0) -> tuple[ThreadingHTTPServer, str]:
    """A server that does not run yet, and the address of its page.

    Args:
        look: rows of "servers" and of "builds", each column -> text; "charts": server -> charts of its run; "reports": server -> the
            command that shows this run when it has ended.
        port: 0: a free one.

    Raises:
        OSError: the port is taken.
    """
    token = secrets.token_urlsafe(16)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given, _, rest = self.path.lstrip("/").partition("/")
            if not secrets.compare_digest(given.encode(), token.encode()) or rest not in ("", "look.json"):
                self.send_error(404)
                return
            if not rest:
                self._send(_page(), "text/html; charset=utf-8")
                return
            try:
                found = look()
            except Exception as error:  # noqa: BLE001 - told to whoever looks
                self.log_error("%s", error)
                self.send_error(503)
                return
            self._send(json.dumps(found), "application/json")

        def _send(self, text: str, kind: str) -> None:
            data = text.encode()
            self.send_response(200)
            for name, value in (("Content-Type", kind), ("Content-Length", str(len(data)))):
                self.send_header(name, value)
            self.send_header("Content-Security-Policy", POLICY)
            self.send_header("Referrer-Policy", "no-referrer")
            with suppress(ConnectionError):  # who asked has left
                self.end_headers()
                self.wfile.write(data)

        def log_request(self, code: Any = "-", size: Any = "-") -> None:
            """Every two seconds: nothing to log."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    return server, f"http://127.0.0.1:{server.server_address[1]}/{token}/"
