-- The server's clock in microseconds since the epoch. No caller has a say in it.
local function server_time()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end
