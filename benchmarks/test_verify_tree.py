"""verify_tree beside a softmax of its rows, the bytes of SGLang's rule; and build_tree."""


def test_verify_tree(measure, case, backend, device_type):
    measure(case, backend, device_type)


def test_build_tree(measure, case, backend, device_type):
    measure(case, backend, device_type)
