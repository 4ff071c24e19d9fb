"""placeholder"""
from raysvc.actors.batch_server import BatchServer


class RolloutServer(BatchServer):
    pass
