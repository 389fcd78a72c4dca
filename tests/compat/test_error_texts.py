"""What is passed on of the errors that libraries raise."""

from __future__ import annotations

import pytest

from understudy.compat.error_texts import first_line

IN_A_GRAPH = """Graph execution error:

Detected at node compile_loss/mae/mul defined at (most recent call last):
  File "model.py", line 7, in <module>

Incompatible shapes: [5,7] vs. [5]
\t [[{{node compile_loss/mae/mul}}]] [Op:__inference_1]"""
ON_THE_SAME_LINE = """Graph execution error:

indices[0,0] = 12 is not in [0, 11)\t [[{{node embedding/GatherV2}}]]"""
IN_A_GENERATOR = """Graph execution error:

Detected at node PyFunc defined at (most recent call last):
<stack traces unavailable>
RuntimeError: disk gone
Traceback (most recent call last):

  File "own.py", line 23, in gen

RuntimeError: disk gone


\t [[{{node PyFunc}}]]
\t [[while/IteratorGetNext]] [Op:__inference_run_steps_1478]"""
EAGER = "{{function_node __wrapped__Mul_device_/device:CPU:0}} Incompatible shapes: [5,7] vs. [5] [Op:Mul] name: "

OF_SEVERAL = """Graph execution error:

2 root error(s) found.
  (0) INVALID_ARGUMENT: indices[0,0] = 12 is not in [0, 11)
\t [[{{node embedding/GatherV2}}]]
  (1) CANCELLED: Function was cancelled before it was started"""

IN_A_LAYER = """Exception encountered when calling Upper.call().

\x1b[1mA tensor is no `bool`. You can do this: or that.\x1b[0m

Arguments received by Upper.call():
  • inputs=tf.Tensor(shape=(None, 3), dtype=float32)"""
IN_A_LAYER_OF_A_TRACE = f"""in user code:

    File "traceback_utils.py", line 881, in error_handler  *
        filtered_tb = _process_traceback_frames(e.__traceback__)

    ValueError: {IN_A_LAYER}"""

IN_A_CONFIGURATION = """<class 'Sequential'> could not be deserialized properly. Please ensure more.

config={'class_name': 'Sequential'}.

Exception encountered: <class 'Stack'> could not be deserialized properly. Please ensure more.

config={'class_name': 'Stack'}.

Exception encountered: Could not locate class 'Plain'. Make sure they are imported. Full object config: {'name': 1}"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\ntwo", "one"),
        ("", "ValueError"),
        (IN_A_GRAPH, "Incompatible shapes: [5,7] vs. [5]"),
        (ON_THE_SAME_LINE, "indices[0,0] = 12 is not in [0, 11)"),
        (IN_A_GENERATOR, "RuntimeError: disk gone"),
        ("Graph execution error:", "Graph execution error:"),
        (IN_A_LAYER, "Upper.call(): A tensor is no `bool`"),
        (IN_A_LAYER_OF_A_TRACE, "Upper.call(): A tensor is no `bool`"),
        (IN_A_CONFIGURATION, "Could not locate class 'Plain'. Make sure they are imported."),
        (OF_SEVERAL, "indices[0,0] = 12 is not in [0, 11)"),
        (EAGER, "Incompatible shapes: [5,7] vs. [5]"),
    ],
)
def test_one_line_says_what_is_wrong(text: str, expected: str) -> None:
    assert first_line(ValueError(text)) == expected
