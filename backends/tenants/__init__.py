"""API keys of tenants, limits of tenants, and the proof of a request's tenant."""

from backends.tenants.api_keys import ApiKeys
from backends.tenants.proof import GATEWAY, tenant_parameters
from backends.tenants.tenants_file import ApiTenant, TenantsInvalid

__all__ = ["GATEWAY", "ApiKeys", "ApiTenant", "TenantsInvalid", "tenant_parameters"]
