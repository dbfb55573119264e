"""What a compiler's backend gets to see of a function."""

from torch._dynamo.backends.common import aot_autograd


class Recorder:
    """A torch.compile backend that runs every graph as it is and keeps those of the direction that was asked for."""

    def __init__(self, backward: bool = False):
        self.graphs = []
        forward_compiler, backward_compiler = (self._run, self._record) if backward else (self._record, self._run)
        self.backend = aot_autograd(fw_compiler=forward_compiler, bw_compiler=backward_compiler)

    def _run(self, graph, inputs):
        return graph.forward

    def _record(self, graph, inputs):
        self.graphs.append(graph)
        return self._run(graph, inputs)

    @property
    def targets(self) -> list:
        """What the kept graphs call, in order."""
        return [node.target for graph in self.graphs for node in graph.graph.nodes if node.op == "call_function"]
