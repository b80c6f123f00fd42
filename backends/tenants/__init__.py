"""Who asks, by which key, and how much may they ask for?"""

from backends.tenants.api_keys import ApiKeys
from backends.tenants.proof import GATEWAY, tenant_parameters
from backends.tenants.tenants_file import ApiTenant, TenantsInvalid

__all__ = ["GATEWAY", "ApiKeys", "ApiTenant", "TenantsInvalid", "tenant_parameters"]
