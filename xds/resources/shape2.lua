local loopback = { ["127.0.0.1"] = true, ["localhost"] = true, ["[::1]"] = true }

local function infrastructure(service)
  return string.find(service, "^grpc%.health%.") or string.find(service, "^grpc%.reflection%.") or
    string.find(service, "^grpc%.channelz%.")
end

-- The form service.namespace:port, in which clusters stand that are not asked for.
local function alias(host, port)
  host = string.match(host, "^([^.]+%.[^.]+)%.svc$") or string.match(host, "^([^.]+%.[^.]+)%.svc%.cluster%.local$") or host
  if not string.find(host, ".", 1, true) then
    host = host .. "." .. NAMESPACE
  end
  if port == "" then
    port = ":80"
  end
  return host .. port
end

function envoy_on_route(call)
  local headers = call:headers()
  local authority = string.lower(headers:get(":authority") or "")
  local service = string.match(headers:get(":path") or "", "^/([%a_][%w_.]*)/[%a_][%w_]*$")
  if service == nil or #service > 255 or #authority > 300 then
    return "unknown"
  end
  local host, port = string.match(authority, "^(.*)(:%d+)$")
  if host == nil then
    host, port = authority, ""
  end
  host = string.gsub(host, "%.$", "")
  local name, rest
  if loopback[host] then
    if infrastructure(service) then
      return "unknown"
    end
    name = NAMESPACE .. "/" .. service
  elseif MODE == "all" then
    rest = "at/" .. alias(host, port)
    name = rest .. "/" .. service
  else
    name = "at/" .. host .. port .. "/" .. service
  end
  if MODE == "on-demand" or call:getCluster(name) ~= nil then
    return name
  end
  if rest ~= nil and call:getCluster(rest) ~= nil then
    return rest
  end
  return "unknown"
end
