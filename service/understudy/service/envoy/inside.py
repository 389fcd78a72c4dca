"""What pyvoy imports inside Envoy."""

from __future__ import annotations

from understudy.service.envoy.host import begin
from understudy.service.envoy.program import Program

app = begin(Program.taken_along())
