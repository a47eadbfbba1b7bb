"""What the interpreter leaves to numpy, in a fixed order: bits can then be compared."""

import pytest


@pytest.fixture
def fixed_order_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tl.dot` adds the products one after the other, as a GPU's does for a given tile.

    The interpreter multiplies with numpy's BLAS, which may add them in an order that depends on
    the shape of the tile and on the processor.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def create_dot(builder, a, b, d, input_precision, max_num_imprecise_acc):
        left, right = (part.data.astype(d.data.dtype) for part in (a, b))
        out = d.data.copy()
        for k in range(left.shape[-1]):
            out += left[..., k, None] * right[..., None, k, :]
        return interpreter.TensorHandle(out, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
