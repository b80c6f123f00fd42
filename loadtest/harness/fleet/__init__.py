"""How are several hosts had on one machine? Network namespaces, their faults, hosts in them."""

from loadtest.harness.fleet.faults import NetworkFault as NetworkFault
from loadtest.harness.fleet.host import FleetHost as FleetHost
from loadtest.harness.fleet.host import HostProcesses as HostProcesses
from loadtest.harness.fleet.namespaces import Namespaces as Namespaces
from loadtest.harness.fleet.namespaces import why_no_namespaces as why_no_namespaces
from loadtest.harness.fleet.served_fleet import ServedFleet as ServedFleet
