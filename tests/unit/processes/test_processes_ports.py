import contextlib
import random
import socket

import pytest

from rltool.errors import UsageError
from rltool.processes.ports import FREE_RANGE, reserve_ports, reserved_ports


def test_reserved_ports_are_distinct_and_outside_the_ephemeral_range():
    with reserved_ports(20) as reservation:
        assert len(set(reservation.ports)) == 20
        assert all(port in FREE_RANGE for port in reservation.ports)


def test_a_reserved_port_is_held_until_released():
    reservation = reserve_ports(1)
    port = reservation.ports[0]
    with pytest.raises(UsageError):
        reserve_ports(1, first=port)
    reservation.release()
    reserve_ports(1, first=port).release()


def test_a_port_in_use_is_a_usage_error_that_names_the_flag():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"--router-port: port {port}"):
            reserve_ports(1, first=port, flag="--router-port")


def pair_of_free_ports() -> int:
    """The first of two neighbours that nobody listens on: a free port's neighbour may well be another test's."""
    for port in random.sample(FREE_RANGE, 100):
        with contextlib.suppress(OSError):
            with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
                pass
            return port
    raise AssertionError("no two neighbouring ports are free")


def test_when_the_second_port_is_taken_the_first_is_given_back():
    low = pair_of_free_ports()
    with socket.create_server(("127.0.0.1", low + 1)):
        with pytest.raises(UsageError):
            reserve_ports(2, first=low)
        reserve_ports(1, first=low).release()


def test_following_ports_are_counted_from_the_first():
    first = pair_of_free_ports()
    with reserved_ports(2, first=first) as reservation:
        assert reservation.ports == (first, first + 1)


def test_a_port_beyond_the_last_is_a_usage_error():
    with pytest.raises(UsageError, match="65536"):
        reserve_ports(2, first=65535)
