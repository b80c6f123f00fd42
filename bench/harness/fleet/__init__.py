"""How does one machine run several hosts? Network namespaces, their faults, hosts in them."""

from bench.harness.fleet.faults import NetworkFault as NetworkFault
from bench.harness.fleet.host import FleetHost as FleetHost
from bench.harness.fleet.host import HostProcesses as HostProcesses
from bench.harness.fleet.namespaces import Namespaces as Namespaces
from bench.harness.fleet.namespaces import why_no_namespaces as why_no_namespaces
from bench.harness.fleet.served_fleet import ServedFleet as ServedFleet
