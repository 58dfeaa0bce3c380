local loopback = { ["127.0.0.1"] = true, ["localhost"] = true, ["[::1]"] = true }

function envoy_on_route(call)
  local headers = call:headers()
  local path = headers:get(":path") or ""
  local service = string.match(path, "^/([%a_][%w_.]*)/[%a_][%w_]*$")
  if service == nil then
    return "unknown"
  end
  local authority = string.lower(headers:get(":authority") or "")
  local host, port = string.match(authority, "^(.*)(:%d+)$")
  if host == nil then
    host, port = authority, ""
  end
  host = string.gsub(host, "%.$", "")
  local name
  if loopback[host] then
    name = NAMESPACE .. "/" .. service
  else
    name = "at/" .. host .. port .. "/" .. service
  end
  if call:getCluster(name) == nil then
    return "unknown"
  end
  return name
end
