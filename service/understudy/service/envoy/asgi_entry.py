"""The module that pyvoy imports inside Envoy."""

from __future__ import annotations

from understudy.service.envoy.host import begin
from understudy.service.envoy.launch import ReexecState

app = begin(ReexecState.restore())
