"""What pyvoy imports inside Envoy."""

from __future__ import annotations

from understudy.service.envoy.host import Host
from understudy.service.envoy.program import Program

app = Host(Program.taken_along())
