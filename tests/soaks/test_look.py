"""What a soak sees of the cluster's processes."""

import os
import socket

from soaks.look import descriptors


def test_connections_of_a_process_to_itself_are_not_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = descriptors(os.getpid())
        with socket.create_connection(listener.getsockname()), listener.accept()[0]:
            assert descriptors(os.getpid()) == before
            with socket.socket():
                assert descriptors(os.getpid()) == before + 1
