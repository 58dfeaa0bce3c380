
function envoy_on_route(call)
  local headers = call:headers()
  local to = headers:get("fingerpost-to")
  if to == nil then
    return "unknown"
  end
  local service = string.match(headers:get(":path") or "", "^/([%a_][%w_.]*)/[%a_][%w_]*$")
  if service == nil or #service > 255 then
    return "to/" .. to
  end
  return "to/" .. to .. "/" .. service
end
