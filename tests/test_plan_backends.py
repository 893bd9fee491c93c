"""Plans run by inductor, and as CUDA graphs: the same values as eager."""

import pytest
import torch

import vescale_fn as vfn
from vescale_fn.plan.execution import backends, cuda_graphs


def step(w, m, x):
    """A gradient by hand (little to compile), and results over donated arguments."""
    y = torch.tanh(x @ w)
    value, grad = y.square().mean(), x.mT @ (y * (1 - y * y))
    m = 0.9 * m + grad
    return value, w - 0.1 * m, m


def arguments(device="cpu"):
    torch.manual_seed(0)
    return torch.randn(4, 3, device=device), torch.zeros(4, 3, device=device), torch.randn(5, 4, device=device)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, where it is imported for the compiler
def test_inductor_gives_the_same_values():
    jitted = vfn.jit(step, backend="inductor", donate_argnums=(0, 1))
    want, got = step(*arguments()), jitted(*arguments())
    torch.testing.assert_close(got, want)  # fused calls round less often
    assert "compiled" in jitted.lower(*arguments()).text()
    w, m, x = arguments()
    for _ in range(3):
        _, w, m = jitted(w, m, x)
    v, n, _ = arguments()
    for _ in range(3):
        _, v, n = step(v, n, x)
    torch.testing.assert_close((w, m), (v, n))
    assert jitted.cache_info().records == 1


def test_what_is_not_there_is_said_at_once():
    with pytest.raises(vfn.errors.TransformError) as caught:
        vfn.jit(step, backend="indctor")
    assert str(caught.value) == (
        "jit: backend='indctor' is not one; did you mean 'inductor'?\n  Instead: 'torch' or 'inductor'"
    )
    if not torch.cuda.is_available():
        with pytest.raises(vfn.errors.TransformError) as caught:
            vfn.jit(step, cuda_graph=True)
        assert str(caught.value) == (
            "jit: cuda_graph=True needs a CUDA device, and there is none here\n"
            "  Instead: leave cuda_graph out: the plan runs on the CPU as well"
        )


def test_what_a_cuda_graph_would_leave_out_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    host = torch.ones(2)

    def f(x):
        vfn.debug_print("{}", x)
        return vfn.scan(lambda x, _: (vfn.cond(x.sum() > 0, torch.neg, torch.exp, x), None), x, None, 2)[0]

    with pytest.raises(vfn.errors.TransformError) as caught:
        vfn.jit(f, cuda_graph=True)(host)
    lines = str(caught.value).splitlines()
    assert lines[0] == "jit: with cuda_graph=True the CPU has no part in a call, but it would have in this one"
    assert lines[1].startswith("  * debug_print, at test_plan_backends.py:")
    assert lines[1].endswith(": it would happen in the first call alone")
    assert lines[2].startswith("  * cond, at test_plan_backends.py:")
    assert lines[2].endswith(": what runs depends on a value")
    assert lines[3:] == [
        "  Instead: leave cuda_graph out; torch.where for a choice; device='cuda' where tensors are made; "
        "vfn.random.wrap_key_data(vfn.random.key_data(key).cuda()) for a key"
    ]
    graph = vfn.jit(lambda x: (x + 1).to("meta")).lower(host).graph
    assert [line.rpartition(": ")[2] for line in cuda_graphs._on_the_cpu(graph)] == [
        "it has tensors on the CPU and on the GPU"
    ]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:TensorFloat32 tensor cores")  # of the compiler
@pytest.mark.parametrize("backend", backends.BACKENDS)
def test_a_cuda_graph_gives_the_same_values(backend):
    w, m, x = arguments("cuda")
    v, n = w.clone(), m.clone()
    jitted = vfn.jit(step, backend=backend, cuda_graph=True, donate_argnums=(0, 1))
    for i in range(4):
        got, w, m = jitted(w, m, x + i)
        want, v, n = step(v, n, x + i)
        torch.testing.assert_close((got, w, m), (want, v, n))
    with pytest.raises(vfn.errors.TransformError, match="the number 0.5"):
        vfn.jit(lambda x, lr: x * lr, cuda_graph=True)(x, 0.5)
